"""Unit 02: what its numbers mean."""

from servelab.quiz import Quiz

QUIZ = Quiz(
    {
        "slot-steps given back": "Eight slots are free once the short answers are done. For how many steps each?",
        "Q1 alone": "Which request decides how long the nine take, whoever leaves early?",
        "padding share": "How many prompt cells has the rectangle, and how many of them hold a token?",
        "by hand": "Write down for each of the four slots when it is free, request by request.",
        "gains nothing": "Compare the finish of both schedules.",
        "gains most": "Draw batches in which one request works and the others are done after a step.",
        "which waste": "How long does a batch run, and how long does it take to fill?",
    }
)
ANSWERS = ("answers",)
CASES = QUIZ.cases
challenges, drive, judge, show = QUIZ.challenges, QUIZ.drive, QUIZ.judge, QUIZ.show
