# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 90 Toy: a unit that is there to test the grader

# %%
from servelab.checking import check


# %% nbgrader={"grade_id": "double", "solution": true} tags=["export"]
def double(n: int) -> int:
    """Twice ``n``."""
    ### BEGIN SOLUTION
    return 2 * n
    ### END SOLUTION


# %%
print("try it:", double(2))

# %% nbgrader={"grade_id": "double-check", "grade": true, "locked": true, "points": 4}
check("toy.double", double)


# %% nbgrader={"grade_id": "running-total", "solution": true} tags=["export"]
class RunningTotal:
    """The sum of all numbers added so far."""

    def __init__(self):
        self.total = 0

    def add(self, n: float) -> float:
        """Add ``n``; return the new total."""
        ### BEGIN SOLUTION
        self.total += n
        return self.total
        ### END SOLUTION


# %% nbgrader={"grade_id": "running-total-check", "grade": true, "locked": true, "points": 6}
check("toy.running_total", RunningTotal)

# %% [markdown] nbgrader={"grade_id": "opinion", "grade": true, "solution": true, "points": 2}
# Your answer.
