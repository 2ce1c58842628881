/* A lasting team of threads that help whoever has a large piece of work.
 *
 * There is one team a process. Its threads are made when first asked for and stay. A
 * job has places; a thread that comes in time takes one, and the caller, who works too,
 * closes the places that are left once it finds nothing more to do. So a job never
 * waits for a thread to wake up, only for those that are inside.
 *
 * A thread without work looks out for the next job for a moment, and only then sleeps:
 * where minibatches are the bound, one job follows upon another, and to wake a dozen
 * threads takes as long as to gather several megabytes.
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
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

enum {
    STACK_BYTES = 256 * 1024,
    LOOK_OUT_NS = 100 * 1000,
    LOOKS = 16, /* between two looks at the clock */
};

/* Sleeping and waking. One side writes that it sleeps and then looks whether it may,
 * the other changes that and then looks whether somebody sleeps. All of these are
 * sequentially consistent, so at least one of the two sees the other; and who sleeps
 * looks, and who wakes signals, under the lock. */
static struct {
    _Atomic(int) is_taken;   /* somebody's job is being done */
    _Atomic(int) places;     /* how many threads may still begin */
    _Atomic(int) inside;     /* how many have begun, or look whether they may */
    _Atomic(int) asleep;     /* how many sleep on `wanted` */
    _Atomic(int) is_waiting; /* the caller sleeps on `finished` */
    TeamWork
        *work;   /* these two by whoever has taken the team, before there are places */
    void *job;   /* borrowed from the caller, while places or inside is not 0 */
    int members; /* threads there are; by whoever has taken the team */
    pthread_mutex_t lock;
    pthread_cond_t wanted;   /* a job has places */
    pthread_cond_t finished; /* nobody but the caller is inside */
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
    team.is_taken = team.places = team.inside = team.asleep = team.is_waiting = 0;
    team.members = 0;
}

static void
set_fork_handler(void)
{
    has_fork_handler = pthread_atfork(NULL, NULL, after_fork_in_child) == 0;
}

static int
has_places(void)
{
    return atomic_load(&team.places) > 0;
}

static int
is_empty(void)
{
    return atomic_load(&team.inside) == 0;
}

static long long
nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Wait a moment for a condition without sleeping; return whether it holds. Lets go of
 * the processor if somebody else wants it. */
static int
look_out(int (*holds)(void))
{
    if (holds()) {
        return 1;
    }
    const long long end = nanoseconds() + LOOK_OUT_NS;
    do {
        for (int i = 0; i < LOOKS; i++) {
            if (holds()) {
                return 1;
            }
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        sched_yield();
    } while (nanoseconds() < end);
    return 0;
}

/* Take a place if there is one. leave() must follow in any case. */
static int
take_place(void)
{
    atomic_fetch_add(&team.inside, 1);
    int places = atomic_load(&team.places);
    while (places > 0 &&
           !atomic_compare_exchange_weak(&team.places, &places, places - 1)) {
    }
    return places > 0;
}

static void
leave(void)
{
    if (atomic_fetch_sub(&team.inside, 1) == 1 && atomic_load(&team.is_waiting)) {
        pthread_mutex_lock(&team.lock);
        pthread_cond_signal(&team.finished);
        pthread_mutex_unlock(&team.lock);
    }
}

static void
sleep_until_wanted(void)
{
    pthread_mutex_lock(&team.lock);
    atomic_fetch_add(&team.asleep, 1);
    while (!has_places()) {
        pthread_cond_wait(&team.wanted, &team.lock);
    }
    atomic_fetch_sub(&team.asleep, 1);
    pthread_mutex_unlock(&team.lock);
}

static void *
member(void *unused)
{
    for (;;) {
        if (!look_out(has_places)) {
            sleep_until_wanted();
        }
        if (take_place()) {
            team.work(team.job);
        }
        leave();
    }
    return unused; /* never */
}

/* Make threads until there are `count`, or no more can be had. */
static void
grow(int count)
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

/* Open the places of a job. */
static void
begin(int helpers, TeamWork *work, void *job)
{
    team.work = work;
    team.job = job;
    atomic_store(&team.places, helpers);
    if (atomic_load(&team.asleep) > 0) {
        pthread_mutex_lock(&team.lock);
        for (int n = atomic_load(&team.asleep); n > 0 && helpers > 0; n--, helpers--) {
            pthread_cond_signal(&team.wanted);
        }
        pthread_mutex_unlock(&team.lock);
    }
}

/* Close the places that are left, and wait for those inside. */
static void
end(void)
{
    atomic_store(&team.places, 0);
    if (look_out(is_empty)) {
        return;
    }
    pthread_mutex_lock(&team.lock);
    atomic_store(&team.is_waiting, 1);
    while (!is_empty()) {
        pthread_cond_wait(&team.finished, &team.lock);
    }
    atomic_store(&team.is_waiting, 0);
    pthread_mutex_unlock(&team.lock);
}

void
team_run(int threads, TeamWork *work, void *job)
{
    int helpers = (threads < TEAM_MOST ? threads : TEAM_MOST) - 1;
    if (helpers <= 0 || atomic_exchange(&team.is_taken, 1)) {
        work(job);
        return;
    }
    if (team.members < helpers) {
        grow(helpers);
    }
    begin(helpers < team.members ? helpers : team.members, work, job);
    work(job);
    end();
    atomic_store(&team.is_taken, 0);
}
