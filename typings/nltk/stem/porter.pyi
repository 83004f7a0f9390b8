# What we use: the package has no types of its own.

class PorterStemmer:
    def stem(self, word: str) -> str: ...
