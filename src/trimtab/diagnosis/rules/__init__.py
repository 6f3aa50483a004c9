"""One rule a file, named like its code."""
