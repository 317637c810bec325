"""memascend: SSD-offloaded fine-tuning with DeepSpeed in a fraction of the host memory.

Nothing is imported or created here but the post-import hook that `torch` installs as well through
the `torch.backends` entry point; `import memascend` is the explicit way to the same activation.
"""

from __future__ import annotations

from memascend.autoload import install
from memascend.version import __version__

__all__ = ["__version__", "install"]

install()
