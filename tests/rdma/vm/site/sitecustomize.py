"""Lets every Python inside the emulated machine use the packages of the venv that started it, editable installs too."""

import os
import site

site.addsitedir(os.environ["BLINK_PACKAGES"])
