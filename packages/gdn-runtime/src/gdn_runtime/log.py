"""The logger of the package.

It carries a NullHandler and nothing else: whoever runs the process decides where records go and from which level on.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("gdn_runtime")
logger.addHandler(logging.NullHandler())
