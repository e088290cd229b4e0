"""The toy task with prefix scores: the share of right letters, after every second letter and at the end."""

from tests.support.toy import ToyTask


class SteppedTask(ToyTask):
    spec = None

    def prefix_scores(self, row, completion):
        places = [*range(2, len(completion) + 1, 2), len(completion)]
        return [(place, completion[:place].count(row["letter"]) / max(place, 1)) for place in places]
