"""The games of GEM that need no download."""

from __future__ import annotations

OFFLINE_GAMES = (
    "game:Crosswords-v0-easy",
    "game:Crosswords-v0-hard",
    "game:FifteenPuzzle-v0-easy",
    "game:FifteenPuzzle-v0-hard",
    "game:Game2048-v0-easy",
    "game:Game2048-v0-extreme-hard",
    "game:Game2048-v0-hard",
    "game:Game2048-v0-random",
    "game:GuessTheNumber-v0-easy",
    "game:GuessTheNumber-v0-hard",
    "game:GuessTheNumber-v0-random",
    "game:Mastermind-v0-easy",
    "game:Mastermind-v0-hard",
    "game:Mastermind-v0-random",
    "game:Minesweeper-v0-easy",
    "game:Minesweeper-v0-hard",
    "game:Minesweeper-v0-random",
    "game:Sokoban-v0-easy",
    "game:Sokoban-v0-hard",
    "game:Sokoban-v0-random",
    "game:Sudoku-v0-easy",
    "game:Sudoku-v0-hard",
    "game:Sudoku-v0-random",
    "game:TowerofHanoi-v0-easy",
    "game:TowerofHanoi-v0-hard",
    "game:TowerofHanoi-v0-random",
)
"""Games without downloads (gem-llm 0.1.0). Wordle, Hangman and WordSearch need NLTK's word list; the random FifteenPuzzle
and Crosswords cannot be constructed."""
