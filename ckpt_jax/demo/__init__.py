"""The demo: a small GPT is killed in the middle of a save, and goes on, bit for bit, on other devices."""

from .story import run as run
