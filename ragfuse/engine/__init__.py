"""From a question to its answer, stage by stage; `Engine` is the only class that users meet."""
