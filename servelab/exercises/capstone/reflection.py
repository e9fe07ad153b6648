"""Unit 11: what a served model taught."""

from servelab.quiz import Quiz

QUIZ = Quiz(
    {
        "sorted and static": "Write down the four batches, each with its longest answer, less its first token.",
        "fewest steps": "No step gives one request two tokens, however many slots are free. What does the first give?",
        "ranks of SmolLM2": "The query heads, the KV heads and the 1536 columns of the MLP all have to go onto them.",
        "numbers a step": "How many layers, how many partial sums in each, how many rows, and how wide is one?",
        "slower on ranks": "What does a rank wait for, sixty times a step, while another waits for a core?",
        "who gains": "In a static batch, when does a short answer's last token come, and when can the next one begin?",
        "other tokens": "Which sums are the same numbers in another order, and how many digits does the type keep?",
    }
)
ANSWERS = ("answers",)
CASES = QUIZ.cases
challenges, drive, judge, show = QUIZ.challenges, QUIZ.drive, QUIZ.judge, QUIZ.show
