"""An evaluator whose metric is no mean: the confusion matrix of all ranks' examples."""

import json

import chainer
import chainer.links as L
import chainermn
import numpy as np

CLASSES = 3


class ConfusionEvaluator(chainermn.extensions.GenericMultiNodeEvaluator):
    def calc_local(self, inputs, labels):
        return self.target(inputs).array.argmax(axis=1), labels

    def aggregate(self, results):
        matrix = np.zeros((CLASSES, CLASSES), int)
        for predicted, labels in results:
            np.add.at(matrix, (labels, predicted), 1)
        right = np.trace(matrix) / matrix.sum()
        return {"matrix": matrix, "accuracy": right}


def make_network():
    np.random.seed(0)
    return L.Linear(4, CLASSES)


def make_examples():
    random = np.random.RandomState(1)
    inputs = random.uniform(-1, 1, (31, 4)).astype(np.float32)
    labels = random.randint(0, CLASSES, 31).astype(np.int32)
    return chainer.datasets.TupleDataset(inputs, labels)


def main():
    comm = chainermn.create_communicator("hierarchical")
    model = L.Classifier(make_network())
    optimizer = chainer.optimizers.SGD(lr=0.0)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm).setup(model)
    examples = None
    if comm.rank == 0:
        examples = make_examples()
    examples = chainermn.scatter_dataset(examples, comm, force_equal_length=False)
    iterator = chainer.iterators.SerialIterator(examples, 4)
    once = chainer.iterators.SerialIterator(examples, 4, repeat=False, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (2, "iteration"))
    evaluator = ConfusionEvaluator(comm, once, model.predictor)
    trainer.extend(evaluator, trigger=(1, "iteration"))
    seen = []

    @trainer.extend
    def note_observation(trainer):
        noted = {}
        for key in ("validation/matrix", "validation/accuracy"):
            noted[key] = np.asarray(trainer.observation[key]).tolist()
        seen.append(noted)

    trainer.run()
    everyone = comm.gather_obj(seen)
    if comm.rank == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()
