"""Settings of the whole suite."""

from __future__ import annotations

import os

# Before torch is imported: threads that spin slow a busy machine several times over, and tiny models gain nothing from many.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "2")

from hypothesis import settings

settings.register_profile("valence", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("valence")
