"""What daskinfer runs on each worker.

``runtime``
    the plugin: messages in, messages out
``loading``, ``building``
    models into the worker, in the background; how they are made
``unloading``, ``parking``
    models off the device; those that stay in the host's memory, to come back
``room``
    how much memory models may take
``models``
    a loaded model: warmed, called
``job``
    a batch that has arrived
``caching``, ``result_cache``
    the results that are kept, by deployment
``cached_run``, ``pending``
    a batch of which only what is new is computed; what is being computed
``inputs``
    what requests bring, unpickled and completed
``device_queue``
    the thread that models run on, one thing at a time
``threads``
    functions on threads that keep nothing of them
``execution``
    a batch through a model: joined, padded, run, divided
``hollow``
    requests whose arrays have no elements along any axis
``footprint``
    what passes take of the device's memory
``resources``
    taking turns with the user's own tasks on the device
``restarting``
    how the Nanny is made to start the process anew
``telemetry``, ``exposition``
    how the devices are doing, and all other figures for who watches
``results``, ``reporting``
    results into the worker's memory; what the scheduler is told
"""

from __future__ import annotations

from daskinfer.worker.runtime import InferenceRuntime

__all__ = ["InferenceRuntime"]
