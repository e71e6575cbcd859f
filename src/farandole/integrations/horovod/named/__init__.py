"""Named collectives: operations that ranks submit in any order, from any thread, and that are matched by name.

An operation passes these stages. Each stage has one type, named after it:

    the caller's thread
        Submission        one rank's part: request, tensor and handle        operations.py, asynchronous.py
            |             A Call makes and checks it, as far as one          calls.py
            |             rank alone can; it enters this rank's TensorQueue  tensor_queue.py
    the thread that runs the rounds, on all ranks at once: one round         engine.py
            |
        Request           the description of it that the other ranks need    stages.py
            |             Each rank sends a RequestList; a request that the  engine.py (exchange)
            |             ResponseCache holds is one number in it            negotiation.py
            |
            |             From here on all ranks compute the same from the
            |             same request lists, without a further message:
            |
        PendingOperation  some members have requested it                     pending.py
            |
        MatchedOperation  all members have, and their requests agree         negotiation.py, stages.py
            |
        Response          the decision: Execute, of several fused            negotiation.py
            |             operations or of one, or Fail, ...
            |
            |             Each rank carries out the responses in order:
            |
        (the tensors)     are reduced and moved over a transport             execution.py
            |
    the caller's thread
        Handle            holds the result or the error; synchronize()       tensor_queue.py
                          waits for it

The names are Horovod's where it has the same: Request, RequestList, Response, ResponseCache, TensorQueue. Its
TensorTableEntry is a Submission here. A Response is never sent, since each rank computes it.
"""
