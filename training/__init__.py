"""How the reader's adapter is made: examples from SQuAD and from rules, and the training itself.
Not installed.
"""
