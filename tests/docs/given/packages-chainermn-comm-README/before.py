from types import SimpleNamespace

import numpy

param = SimpleNamespace(data=numpy.zeros(3, "f4"), grad=numpy.ones(3, "f4"))
model = SimpleNamespace(namedparams=lambda: [("/w", param)])
