"""Unit 00: what the warm-up's number means."""

from servelab.quiz import Quiz

QUIZ = Quiz(
    {
        "steps in a slot after the answer is done": "A short request is done after its own 20 steps; the batch is not.",
        "what raises utilisation": "Which of them changes the lengths that share a batch?",
        "utilisation of ten such batches": "Both sides of the fraction grow.",
    }
)
ANSWERS = ("answers",)
CASES = QUIZ.cases
challenges, drive, judge, show = QUIZ.challenges, QUIZ.drive, QUIZ.judge, QUIZ.show
