"""`python -m peagle`, which torchrun needs."""

import sys

from peagle.cli.main import main

sys.exit(main())
