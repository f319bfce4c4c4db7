"""Designed inputs: each probe makes one feature, and the mistakes people make with it, visible.

A call is made of **features** (``features``, ``own``), each in one of several **levels**; a probe is a recipe, level by
feature, and can be drawn again with one feature less, other sizes or another seed (:func:`redraw`).  Three families:

* every level **alone**, on the plainest call: what a candidate takes is asked first, and what fails alone is known alone;
* **special** values beside the levels that show them;
* a **covering array** (``covering``): every pair of levels stands together in some probe, with ``thorough`` every triple.

A probe passes only what it is about: no option that equals its default or follows from an array given beside it.
"""

from refattn.verification.probes.covering import covering_rows
from refattn.verification.probes.draft import Impossible
from refattn.verification.probes.plan import Entry, Plan, probes, redraw
from refattn.verification.probes.probe import Probe, storage_dtype

__all__ = ["Entry", "Impossible", "Plan", "Probe", "covering_rows", "probes", "redraw", "storage_dtype"]
