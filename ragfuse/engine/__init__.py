"""The path from a question to its answer, stage by stage; `Engine` is its only public class."""
