"""What daskinfer runs on each worker.

``runtime``
    the plugin: messages in, messages out
``loading``
    models into the worker, in the background
``models``
    a loaded model: warmed, called
``inputs``
    what requests bring, unpickled and completed
``device_queue``
    the thread that models run on, one thing at a time
``execution``
    a batch through a model: joined, padded, run, divided
``footprint``
    what passes take of the device's memory
``resources``
    taking turns with the user's own tasks on the device
``restarting``
    how the Nanny is made to start the process anew
``results``
    results into the worker's memory
"""

from __future__ import annotations

from daskinfer.worker.runtime import InferenceRuntime

__all__ = ["InferenceRuntime"]
