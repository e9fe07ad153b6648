"""Decides and records the grades of a class. Never visible to a submission."""

import sys

# jsonschema, which nbformat uses, compiles a grammar for IRIs whenever it is imported, a second in every process; it
# does without if that package is missing, and notebooks hold nothing to check with it.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
