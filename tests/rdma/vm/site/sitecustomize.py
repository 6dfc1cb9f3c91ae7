"""Lets every Python inside the emulated machine use the packages of the venv that started it, editable installs too."""

import os
import site
import sys

site.addsitedir(os.environ["BLINK_PACKAGES"])
if os.environ["BLINK_PYVERBS"]:  # another one than Debian's
    sys.path.insert(0, os.environ["BLINK_PYVERBS"])
