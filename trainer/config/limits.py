"""The limits of flags of teachers and evaluators, and of the settings that say the same."""

from trainer.system.untrusted_data import LARGEST

MOST = LARGEST - 1
"""A seed, or a count of tokens: no folder's description with more is read."""
HOTTEST = 1000.0
"""A temperature: every token is about as likely as any other long before."""
MOST_DRAWS = 32767
"""At a position: shards count them in 16 bits."""
SHORTEST_WINDOW = 2
"""Tokens: nothing predicts the first one."""
MOST_ANSWERS = 10_000
"""Answers to a prompt, which are all in one shard."""
MOST_NEW_TOKENS = 1_000_000
"""Tokens of a text that is generated."""
