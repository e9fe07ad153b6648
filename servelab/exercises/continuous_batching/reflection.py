"""Unit 04: what its numbers mean."""

from servelab.quiz import Quiz

QUIZ = Quiz(
    {
        "tokens in the cache": "Each token of the answer but one is fed back to get the next.",
        "steps to the first token": "What do the decodes leave of each step's budget? The last chunk's step counts.",
        "mean time in the system": "Little's law has three quantities, and two are given. To three significant digits.",
        "who is preempted": "Think of two requests that both grow, and of what each needs to come to its end.",
        "which idea": "What is full, and what is most of it filled with?",
        "what a mean hides": "Which gaps are few and long, so that a mean over all of them hardly moves?",
        "swap or recompute": "Compute by how much the step gets longer, with 32 tokens in it and with 332.",
    }
)
ANSWERS = ("answers",)
CASES = QUIZ.cases
challenges, drive, judge, show = QUIZ.challenges, QUIZ.drive, QUIZ.judge, QUIZ.show
