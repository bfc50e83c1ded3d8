import numpy as np
import pytest

from trainer.data.metrics import compute_accuracy, compute_matthews, mean_loss, sum_confusions


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_scikit_learn(classes: int, seed: int):
    from sklearn.metrics import accuracy_score, confusion_matrix, matthews_corrcoef

    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, 200)
    predictions = np.where(draw.random(200) < 0.6, labels, draw.integers(0, classes, 200))
    confusion = confusion_matrix(labels, predictions, labels=range(classes)).tolist()
    assert compute_accuracy(confusion) == pytest.approx(
        accuracy_score(labels, predictions), abs=1e-12
    )
    assert compute_matthews(confusion) == pytest.approx(
        matthews_corrcoef(labels, predictions), abs=1e-12
    )


@pytest.mark.parametrize(
    "confusion",
    [
        pytest.param([[0, 0], [0, 0]], id="no samples"),
        pytest.param([[5, 0], [7, 0]], id="constant predictions"),
        pytest.param([[5, 3], [0, 0]], id="one class only"),
    ],
)
def test_an_undefined_correlation_is_zero(confusion: list[list[int]]):
    assert compute_matthews(confusion) == 0.0


def test_counts_beyond_double_precision_stay_exact():
    big = 10**12
    assert compute_matthews([[big, 0], [0, big]]) == 1.0


def test_nothing_counted_has_no_accuracy_and_no_loss():
    assert compute_accuracy([[0, 0], [0, 0]]) == 0.0
    assert mean_loss(0.0, 0) is None
    assert mean_loss(6.0, 4) == 1.5


def test_parts_of_two_workers_add_up():
    assert sum_confusions([[[1, 2], [3, 4]], None, [[10, 0], [0, 10]]]) == [[11, 2], [3, 14]]
