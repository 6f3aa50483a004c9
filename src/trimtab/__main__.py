"""`python -m trimtab`: the command line where no script is on the path."""

from __future__ import annotations

import sys

from trimtab.cli import main

sys.exit(main())
