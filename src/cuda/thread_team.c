/* A lasting team of threads that help whoever has a large piece of work.
 *
 * There is one team a process. Its threads are made when first asked for and stay, and
 * sleep on a condition variable between jobs. A job has places; a thread that wakes in
 * time takes one, and the caller, who works too, closes the places that are left once
 * it finds nothing more to do. So a job never waits for a thread to wake up, only for
 * those that are inside.
 *
 * One job at a time: a second caller works alone, since the processors are busy anyway.
 *
 * The threads are detached, hold nothing and never call Python, so a process may exit
 * around them. A forked child has none of them: it starts with an empty team. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_sigmask, which C11 alone hides */
#endif
#include "thread_team.h"

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

enum { STACK_BYTES = 256 * 1024 };

static struct {
    pthread_mutex_t lock;    /* protects all that follows */
    pthread_cond_t wanted;   /* a job has places */
    pthread_cond_t finished; /* nobody but the caller is inside */
    int is_taken;            /* somebody's job is being done */
    int members;             /* threads there are */
    int places;              /* how many of them may still begin */
    int inside;              /* how many have begun and not ended */
    TeamWork *work;
    void *job; /* borrowed from the caller, while places or inside is not 0 */
} team = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wanted = PTHREAD_COND_INITIALIZER,
    .finished = PTHREAD_COND_INITIALIZER,
};

static pthread_once_t fork_handler_once = PTHREAD_ONCE_INIT;
static int has_fork_handler;

/* The lock may have been held, and the job begun, by a thread that the child lacks. */
static void
after_fork_in_child(void)
{
    team.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    team.wanted = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    team.finished = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    team.is_taken = team.members = team.places = team.inside = 0;
}

static void
set_fork_handler(void)
{
    has_fork_handler = pthread_atfork(NULL, NULL, after_fork_in_child) == 0;
}

static void *
member(void *unused)
{
    pthread_mutex_lock(&team.lock);
    for (;;) {
        while (team.places == 0) {
            pthread_cond_wait(&team.wanted, &team.lock);
        }
        team.places--;
        team.inside++;
        TeamWork *work = team.work;
        void *job = team.job;
        pthread_mutex_unlock(&team.lock);
        work(job);
        pthread_mutex_lock(&team.lock);
        if (--team.inside == 0) {
            pthread_cond_signal(&team.finished);
        }
    }
    return unused; /* never */
}

/* Make threads until there are `count`, or no more can be had. Under the lock. */
static void
grow_locked(int count)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_once(&fork_handler_once, set_fork_handler);
    /* Without the handler a child would wait for threads that it has not. */
    if (!has_fork_handler || pthread_attr_init(&attributes) != 0) {
        return;
    }
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    /* Signals are for threads that run Python. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team.members < count) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, member, NULL) != 0) {
            break;
        }
        team.members++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

void
team_run(int threads, TeamWork *work, void *job)
{
    int helpers = (threads < TEAM_MOST ? threads : TEAM_MOST) - 1;
    int is_mine = 0;
    if (helpers > 0) {
        pthread_mutex_lock(&team.lock);
        if (!team.is_taken) {
            is_mine = team.is_taken = 1;
            if (team.members < helpers) {
                grow_locked(helpers);
            }
            team.work = work;
            team.job = job;
            team.places = helpers < team.members ? helpers : team.members;
            for (int i = 0; i < team.places; i++) {
                pthread_cond_signal(&team.wanted);
            }
        }
        pthread_mutex_unlock(&team.lock);
    }
    work(job);
    if (is_mine) {
        pthread_mutex_lock(&team.lock);
        team.places = 0;
        while (team.inside > 0) {
            pthread_cond_wait(&team.finished, &team.lock);
        }
        team.is_taken = 0;
        pthread_mutex_unlock(&team.lock);
    }
}
