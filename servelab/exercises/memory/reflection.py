"""Unit 01: what its numbers mean."""

from servelab.quiz import Quiz

QUIZ = Quiz(
    {
        "cards for 70B": "The weights must fit into 92 % of each card less 2 GB, and leave room for 8192 tokens.",
        "KV a card at TP16": "In GiB, to three significant digits. 8 KV heads cannot be split over 16 cards.",
        "four copies": "Look at the table of the six layouts: which column differs between A and B?",
        "tokens that weigh as much as the weights": (
            "To three significant digits. Divide the bytes of the weights by those of one token."
        ),
        "FP8 KV": "What does it halve, and what does it leave as it was?",
        "batch past the ridge": "Compare the intensity of attention with the ridge point. Does it depend on the batch?",
    }
)
ANSWERS = ("answers",)
CASES = QUIZ.cases
challenges, drive, judge, show = QUIZ.challenges, QUIZ.drive, QUIZ.judge, QUIZ.show
