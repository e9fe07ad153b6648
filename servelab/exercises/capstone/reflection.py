"""Unit 11: what a served model taught."""

from servelab.quiz import Quiz

QUIZ = Quiz(
    {
        "sorted and static": "Write down the four batches, each with its longest answer, less its first token.",
        "fewest steps": "No step gives one request two tokens, however many slots are free. What does the first give?",
        "ranks of SmolLM2": "The query heads, the KV heads and the 1536 columns of the MLP all have to go onto them.",
        "all-reduces a step": "How many layers are there, and how many partial sums in each?",
        "slower on ranks": "What does one token wait for sixty times?",
        "who gains": "In a static batch, when does a short answer's last token come, and when can the next one begin?",
        "other tokens": "Which sums are the same numbers in another order, and how many digits does the type keep?",
    }
)
ANSWERS = ("answers",)
CASES = QUIZ.cases
challenges, drive, judge, show = QUIZ.challenges, QUIZ.drive, QUIZ.judge, QUIZ.show
