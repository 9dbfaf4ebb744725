"""`python -m aura_omni` is `aura-omni`."""

import sys

from aura_omni.cli import main

sys.exit(main())
