"""Forward passes that compute each distinct prefix of a batch once."""

from agile_trainers.packing.trie import Trie, build_trie, shared_prefixes

__all__ = ["Trie", "build_trie", "shared_prefixes"]
