"""``python -m roundpipe.cli`` is the command ``roundpipe``."""

import sys

from roundpipe.cli import main

sys.exit(main())
