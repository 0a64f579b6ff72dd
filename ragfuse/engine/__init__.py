"""The stages from a question to its answer. `Engine` is the package's only public class."""
