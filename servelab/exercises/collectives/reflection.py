"""Unit 05: what its numbers mean."""

from servelab.quiz import Quiz

QUIZ = Quiz(
    {
        "bytes sent": "A ring sends every chunk twice, but for two of them. How many MiB does a chunk have?",
        "root against ring": "How many tensors leave the root, and how much of one leaves a rank of the ring?",
        "rounds": "How many hops are there in each of the two passes of a ring?",
        "decode": "Put both terms of the ring's cost side by side. Which one is larger, and in which is p a factor?",
        "which bandwidth": "How many GB a second can a rank send while it receives as many?",
        "from busbw": "How large is the algorithm bandwidth of an all-reduce then? Milliseconds, to three digits.",
        "slow link": "How many of the hops use the slow link, and what do the other ranks do meanwhile?",
        "lucky sends": "When does a send return that nobody buffers?",
    }
)
ANSWERS = ("answers",)
CASES = QUIZ.cases
challenges, drive, judge, show = QUIZ.challenges, QUIZ.drive, QUIZ.judge, QUIZ.show
