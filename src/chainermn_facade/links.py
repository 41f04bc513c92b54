"""Links whose parts are on several ranks."""

from chainermn_modelparallel import create_multi_node_n_step_rnn

__all__ = ["create_multi_node_n_step_rnn"]
