"""What a compiled program really communicates: anybody's function, Compiled, or HLO text."""

from jaxpar.audit.result import Audit, Collective, Finding, Memory
from jaxpar.audit.source import audit

__all__ = ["Audit", "Collective", "Finding", "Memory", "audit"]
