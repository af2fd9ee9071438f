"""The HTML report and the summary of a run."""
