"""Unit 06: what its numbers mean."""

from servelab.quiz import Quiz

QUIZ = Quiz(
    {
        "all-reduces a token": "How many all-reduces has a layer in a forward pass, and how many layers are there?",
        "KV copies": "How many ranks share one KV head when there are more ranks than KV heads?",
        "KV of a 70B card": "How many KV heads does a card hold at TP8, and how many at TP16?",
        "ratio at TP4": "Use tp_bytes over boundary_bytes, or the formula of the worked example with t = 4.",
        "crossing point": "Set both terms of an all-reduce equal. B is for one direction, an MB 1e6 bytes.",
        "A, the link": "Count how often each of the two sends, and who waits for it.",
        "B, decoding": "Change one of the two numbers at a time, and look at step_seconds.",
        "C, what TP8 gives": "What does a card hold besides its share of the weights (unit 01)?",
    }
)
ANSWERS = ("answers",)
CASES = QUIZ.cases
challenges, drive, judge, show = QUIZ.challenges, QUIZ.drive, QUIZ.judge, QUIZ.show
