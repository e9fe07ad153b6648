"""Unit 03: what its numbers mean."""

from servelab.quiz import Quiz

QUIZ = Quiz(
    {
        "mean empty slots": "The last block holds 1 to 24 tokens, each number equally often. How many are empty?",
        "what 20.4 % is": "It is one of the four words: look up in which column of the table of Fig. 2 it stands.",
        "regions that fit": "A region is given whole or not at all.",
        "batching without paging": "Must a request know where the others' KV lies in order to take part in a step?",
        "recomputed block": "The logits of the last token are needed. Blocks are counted from 0.",
        "why values are masked": "Work out a product of 0 and each thing that such a slot can hold.",
    }
)
ANSWERS = ("answers",)
CASES = QUIZ.cases
challenges, drive, judge, show = QUIZ.challenges, QUIZ.drive, QUIZ.judge, QUIZ.show
