"""Names in snapshots of the links are those of older versions, so each loads the other's."""

from __future__ import annotations

import io
from typing import Any

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn_modelparallel import (
    MultiNodeBatchNormalization,
    MultiNodeChainList,
    create_mnbn_model,
    create_multi_node_n_step_rnn,
)

pytestmark = pytest.mark.world

BN = ["N", "avg_mean", "avg_var", "beta", "gamma"]


def names(link: chainer.Link) -> list[str]:
    file = io.BytesIO()
    chainer.serializers.save_npz(file, link)
    file.seek(0)
    with np.load(file) as loaded:
        return sorted(loaded.files)


def chain_list(comm: Any) -> chainer.Link:
    model = MultiNodeChainList(comm)
    model.add_link(chainer.Chain(l1=L.Linear(2, 2)), rank_out=comm.rank)
    model.add_link(L.Linear(2, 2, nobias=True), rank_in=comm.rank)
    return L.Classifier(model)


def converted(comm: Any) -> chainer.Link:
    part = chainer.Sequential(L.Linear(2, 2), L.BatchNormalization(2))
    return create_mnbn_model(chainer.Chain(a=part, b=L.BatchNormalization(2)), comm)


def rnn(comm: Any) -> chainer.Link:
    return create_multi_node_n_step_rnn(L.NStepRNNTanh(1, 2, 2, 0.0), comm)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda comm: MultiNodeBatchNormalization(3, comm), BN),
        (lambda comm: MultiNodeBatchNormalization(3, comm, use_gamma=False), BN[:-1]),
        (chain_list, ["predictor/0/l1/W", "predictor/0/l1/b", "predictor/1/W"]),
        (
            converted,
            ["a/0/W", "a/0/b", *(f"a/1/{n}" for n in BN), *(f"b/{n}" for n in BN)],
        ),
        (rnn, [f"actual_rnn/0/{name}" for name in ("b0", "b1", "w0", "w1")]),
    ],
)
def test_names_in_a_snapshot(comm, make, expected):
    assert names(make(comm)) == expected
