"""Where ``MemestCallback`` was before ``from memest import MemestCallback``."""

from memest.calibration.live import MemestCallback as MemestCallback
