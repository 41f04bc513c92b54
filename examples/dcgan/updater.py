"""An updater of one's own: a step of the generator, then one of the discriminator."""

import chainer
import chainer.functions as F
from chainer import training


class DCGANUpdater(training.StandardUpdater):
    """Knows nothing of ranks: its optimizers average gradients, in the same order on all ranks.

    Args:
        models: the generator and the discriminator.
        kwargs: those of StandardUpdater; ``optimizer`` has one by the name of each.
    """

    def __init__(self, *, models, **kwargs):
        self.generator, self.discriminator = models
        super().__init__(**kwargs)

    def update_core(self):
        real = chainer.Variable(
            self.converter(self.get_iterator("main").next(), self.device)
        )
        z = self.generator.xp.asarray(self.generator.draw(len(real)))

        fake = self.generator(z)
        judged_real, judged_fake = self.discriminator(real), self.discriminator(fake)
        self.get_optimizer("generator").update(self.loss_of_generator, judged_fake)
        fake.unchain_backward()  # the discriminator's step leaves the generator alone
        self.get_optimizer("discriminator").update(
            self.loss_of_discriminator, judged_real, judged_fake
        )

    def loss_of_generator(self, judged_fake):
        loss = F.mean(F.softplus(-judged_fake))
        chainer.report({"loss": loss}, self.generator)
        return loss

    def loss_of_discriminator(self, judged_real, judged_fake):
        loss = F.mean(F.softplus(-judged_real)) + F.mean(F.softplus(judged_fake))
        right = ((judged_real.array > 0).mean() + (judged_fake.array < 0).mean()) / 2
        chainer.report({"loss": loss, "accuracy": right}, self.discriminator)
        return loss
