"""Stands in for Transformer Engine 2.x in tests: what core 0.19.2 and we call, with the published signatures.

Same arithmetic in plain torch; what is one kernel there is a function marked `kernel` here, for those who count. What
is left out raises ImportError, as it would in a release without it. On no path but that of tests.
"""

from transformer_engine import common, pytorch

__version__ = "2.9.0"
__all__ = ["common", "pytorch"]
