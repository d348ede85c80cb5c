"""The linter of a training script and its job: what hangs, crashes or trains something else.

Reads files only; the user's code is parsed and never run or imported.
"""

from .check import check_job, check_script
from .rules import RULES, Finding, LintRule, Severity

__all__ = ["RULES", "Finding", "LintRule", "Severity", "check_job", "check_script"]
