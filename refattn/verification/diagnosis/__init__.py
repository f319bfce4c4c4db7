"""What explains a mismatch: known mistakes and other conventions, where they are made, and the step where a kernel departs."""

from refattn.verification.diagnosis.calls import JudgedCall
from refattn.verification.diagnosis.hypotheses import Hypothesis, Workbench
from refattn.verification.diagnosis.localise import Departure, departure
from refattn.verification.diagnosis.search import Explanation, Live, explain

__all__ = ["Departure", "Explanation", "Hypothesis", "JudgedCall", "Live", "Workbench", "departure", "explain"]
