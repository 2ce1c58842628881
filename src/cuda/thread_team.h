/* Threads that share a piece of work, and how many of them the process may use. No
 * Python in either. */
#ifndef BRAINSTORM_DBUF_THREAD_TEAM_H
#define BRAINSTORM_DBUF_THREAD_TEAM_H

enum { TEAM_MOST = 64 }; /* threads, the caller's among them */

/* What a thread does: take shares of the job until there are none left. */
typedef void TeamWork(void *job);

/* Run work(job) on the calling thread and on up to threads - 1 others at once; return
 * when all are out of it. Threads that come too late, cannot be made, or are at
 * another caller's work are not waited for: the caller then does their share. Never
 * fails. */
void team_run(int threads, TeamWork *work, void *job);

/* How many processors the process may use, at least 1: by its affinity and by the CPU
 * quota of its control groups, which `listing` (/proc/self/cgroup) names and `root`
 * (/sys/fs/cgroup) describes (cpu_allowance.c). */
int cpu_allowance(const char *listing, const char *root);

#endif
