"""The page of TT106."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT106",
    seen="""
        `trimtab doctor` says that torch cannot be imported, or that bitsandbytes has no compiled
        library for the CUDA version of torch; or bitsandbytes says so, when a quantized layer is
        made or called: `CUDA VERSION MISMATCH`, `CUDA SETUP ERROR`.
        """,
    why="""
        torch, its CUDA libraries and the quantizer's are compiled for each other. After one of
        them was upgraded alone, or was installed over another build, a library is missing or has
        other functions than those that are called. bitsandbytes comes with one library for each
        CUDA version that it knows, and takes the one of torch's.
        """,
    versions="""
        All. A torch that is newer than bitsandbytes may have a CUDA version that it does not
        know yet.
        """,
    fix="""
        `pip install -U torch bitsandbytes` in a fresh environment. `trimtab doctor --measure`
        then shows whether torch works and what it sees.
        """,
    library="the environment",
    not_helping="""
        Installing the CUDA toolkit: torch brings its own libraries. `BNB_CUDA_VERSION` only
        helps if a library of that version is there.
        """,
    signs=(
        Sign(
            r"Attempted to use bitsandbytes native library|Native code method attempted to call"
            r"|(CUDA|ROCm) VERSION MISMATCH|SETUP ERROR: Missing dependency",
            ("RuntimeError",),
            through=r"^bitsandbytes/",
        ),
        # Whatever it says: bitsandbytes calls a library that it could not load.
        Sign(
            "",
            ("RuntimeError",),
            innermost=r"^bitsandbytes/cextension\.py:throw_on_call$",
            alone=False,
        ),
        Sign(
            r"lib\S+\.so\S*: (cannot open shared object file|undefined symbol|version .* not found)"
            r"|undefined symbol: \w+|\[WinError (126|127|1114)\]",
            ("ImportError", "OSError", "AttributeError"),
            through=r"^(torch|bitsandbytes)/",
            alone=False,
        ),
    ),
)
