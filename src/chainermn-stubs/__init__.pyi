from chainermn_facade import *

from . import communicators as communicators
from . import datasets as datasets
from . import extensions as extensions
from . import functions as functions
from . import global_except_hook as global_except_hook
from . import iterators as iterators
from . import links as links
from . import optimizers as optimizers
