"""Jobs: receives steps that may depend on one another, hands on their results."""

from service.jobs.jobs import Jobs
from service.jobs.model import Job, Step

__all__ = ["Job", "Jobs", "Step"]
