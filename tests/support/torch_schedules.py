"""Which schedule of torch is which of memest's."""

from torch.distributed.pipelining import schedules

from memest.config.parallelism import Schedule

THEIRS = {
    Schedule.GPIPE: schedules.ScheduleGPipe,
    Schedule.ONE_F_ONE_B: schedules.Schedule1F1B,
    Schedule.LOOPED_BFS: schedules.ScheduleLoopedBFS,
    Schedule.INTERLEAVED: schedules.ScheduleInterleaved1F1B,
}
