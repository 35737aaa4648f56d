"""Python imports this file at its start where PYTHONPATH names this folder, in the tests' child processes too.

It removes the finder of an editable installation, which would import the checkout that was installed and not the copy
that this file lies in, and ends the process if headrace would still come from elsewhere.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[3] / "src"

sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
found = find_spec("headrace")
if found is None or found.origin is None or not Path(found.origin).is_relative_to(SOURCE):
    sys.stderr.write(f"headrace would be imported from {found and found.origin}, not from {SOURCE}\n")
    os._exit(70)  # an exception here would be ignored, and its exit status could pass for a failed test
