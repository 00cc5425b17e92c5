import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.function.BooleanSupplier;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.ApplicationRecoverableException;
import org.apache.kafka.common.errors.FencedInstanceIdException;
import org.apache.kafka.common.errors.InvalidConfigurationException;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * The programs transfer.py and transform.py with Kafka's Java clients, which speak transactions v2 where the
 * brokers do. Arguments and words are those of program.py.
 */
public final class ChaosTransactions {
    private static final int FENCED = 3;
    private static final long INSISTENCE_MS = 240_000;
    private static final int BATCH = 100;

    private final Map<String, String> given;
    private final Random choose;
    private final KafkaProducer<byte[], byte[]> producer;

    public static void main(String[] arguments) throws Exception {
        Map<String, String> given = new HashMap<>();
        for (String word : arguments) {
            given.put(word.substring(0, word.indexOf('=')), word.substring(word.indexOf('=') + 1));
        }
        Thread watch = new Thread(() -> {
            try {
                while (System.in.read() >= 0) {
                    continue;
                }
            } catch (java.io.IOException gone) {
                // As good as the end.
            }
            Runtime.getRuntime().halt(0);
        });
        watch.setDaemon(true);
        watch.start();
        try {
            ChaosTransactions program = new ChaosTransactions(given);
            if (given.containsKey("output")) {
                program.transform();
            } else {
                program.transfer();
            }
        } catch (Fenced why) {
            say("fenced " + why.getCause());
            Runtime.getRuntime().halt(FENCED);
        } catch (Throwable other) {
            other.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    private ChaosTransactions(Map<String, String> given) {
        this.given = given;
        choose = new Random(Long.parseLong(given.get("seed")));
        Map<String, Object> settings = settings();
        settings.put("transactional.id", given.get("id"));
        settings.put("transaction.timeout.ms", given.get("timeout_ms"));
        settings.put("linger.ms", String.valueOf(choose.nextInt(3)));
        settings.put("max.block.ms", "10000");
        settings.put("delivery.timeout.ms", "30000");
        producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
        insist(producer::initTransactions);
        say("ready");
    }

    private Map<String, Object> settings() {
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", given.get("bootstrap"));
        settings.put("request.timeout.ms", "4000");
        settings.put("retry.backoff.ms", "20");
        settings.put("retry.backoff.max.ms", "200");
        settings.put("reconnect.backoff.ms", "20");
        settings.put("reconnect.backoff.max.ms", "200");
        settings.put("metadata.max.age.ms", "5000");
        return settings;
    }

    /** The producer can do no more. */
    private static final class Fenced extends RuntimeException {
        private static final long serialVersionUID = 1;

        Fenced(Throwable why) {
            super(why);
        }
    }

    /** Call again while there is no answer, as the documentation of the producer allows. */
    private static void insist(Runnable call) {
        long deadline = System.currentTimeMillis() + INSISTENCE_MS;
        while (true) {
            try {
                call.run();
                return;
            } catch (TimeoutException noAnswer) {
                if (System.currentTimeMillis() > deadline) {
                    throw noAnswer;
                }
            } catch (ApplicationRecoverableException | InvalidConfigurationException fatal) {
                // ProducerFencedException is one of these; each of them asks for a new producer.
                throw new Fenced(fatal);
            }
        }
    }

    /** One transaction; the work says whether to commit. Returns whether it was committed. */
    private boolean attempt(int number, BooleanSupplier work) {
        boolean isAsked = false;
        try {
            try {
                producer.beginTransaction();
                boolean isMeant = work.getAsBoolean();
                if (isMeant) {
                    isAsked = true;
                    insist(producer::commitTransaction);
                    say("committed " + number);
                    return true;
                }
            } catch (ProducerFencedException | FencedInstanceIdException fenced) {
                throw new Fenced(fenced);
            } catch (ApplicationRecoverableException fatal) {
                throw new Fenced(fatal);
            } catch (KafkaException | IllegalStateException failed) {
                // To be aborted; that says so if it cannot be either.
                if (failed.getCause() instanceof ApplicationRecoverableException) {
                    throw new Fenced(failed.getCause());
                }
            }
            try {
                insist(producer::abortTransaction);
            } catch (KafkaException fatal) {
                throw new Fenced(fatal);
            }
            say("aborted " + number);
            return false;
        } catch (Fenced fenced) {
            say((isAsked ? "unknown " : "aborted ") + number);
            throw fenced;
        }
    }

    private void transfer() throws InterruptedException {
        int accounts = Integer.parseInt(given.get("partitions"));
        double rate = Double.parseDouble(given.get("rate"));
        List<Integer> all = new ArrayList<>();
        for (int account = 0; account < accounts; account++) {
            all.add(account);
        }
        for (int number = 0; true; number++) {
            Collections.shuffle(all, choose);
            int shares = choose.nextInt(5) > 0 ? 2 : Math.min(accounts, 2 + choose.nextInt(4));
            boolean isMeant = choose.nextInt(100) < 85;
            Map<Integer, Integer> amounts = new LinkedHashMap<>();
            int total = 0;
            for (int account : all.subList(1, shares)) {
                int amount = 1 + choose.nextInt(100);
                total += amount;
                amounts.put(account, amount);
            }
            amounts.put(all.get(0), -total);
            StringBuilder text = new StringBuilder();
            text.append(given.get("client")).append(' ').append(given.get("instance")).append(' ').append(number);
            text.append(isMeant ? " commit " : " abort ");
            String separator = "";
            for (Map.Entry<Integer, Integer> each : amounts.entrySet()) {
                text.append(separator).append(each.getKey()).append(':').append(each.getValue());
                separator = ",";
            }
            byte[] value = text.toString().getBytes(StandardCharsets.UTF_8);
            attempt(number, () -> {
                for (int account : amounts.keySet()) {
                    producer.send(new ProducerRecord<>(given.get("topic"), account, null, value));
                    if (choose.nextInt(10) == 0) {
                        // In the logs, and open, for a while: somebody may die now.
                        producer.flush();
                        pause(choose.nextInt(200));
                    }
                }
                if (!isMeant) {
                    producer.flush();
                }
                return isMeant;
            });
            pause((long) (choose.nextDouble() * 2000 / rate));
        }
    }

    private void transform() {
        Map<String, Object> settings = settings();
        settings.put("group.id", given.get("group"));
        settings.put("isolation.level", "read_committed");
        settings.put("enable.auto.commit", "false");
        settings.put("auto.offset.reset", "earliest");
        settings.put("session.timeout.ms", "6000");
        settings.put("heartbeat.interval.ms", "1000");
        settings.put("max.poll.interval.ms", "15000");
        settings.put("fetch.max.wait.ms", "100");
        settings.put("max.poll.records", String.valueOf(BATCH));
        // The group is shared with members that know no other.
        settings.put("partition.assignment.strategy", "org.apache.kafka.clients.consumer.RangeAssignor");
        int partitions = Integer.parseInt(given.get("partitions"));
        try (KafkaConsumer<byte[], byte[]> consumer =
                new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            consumer.subscribe(List.of(given.get("topic")));
            for (int number = 0; true; ) {
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(200));
                if (records.isEmpty()) {
                    continue;
                }
                int current = number++;
                boolean isCommitted = attempt(current, () -> {
                    Map<TopicPartition, OffsetAndMetadata> positions = new HashMap<>();
                    for (ConsumerRecord<byte[], byte[]> record : records) {
                        producer.send(new ProducerRecord<>(
                                given.get("output"), choose.nextInt(partitions), null, output(record, current)));
                        positions.put(
                                new TopicPartition(record.topic(), record.partition()),
                                new OffsetAndMetadata(record.offset() + 1));
                    }
                    if (choose.nextInt(10) == 0) {
                        producer.flush();
                        pause(choose.nextInt(300));
                    }
                    insist(() -> producer.sendOffsetsToTransaction(positions, consumer.groupMetadata()));
                    return choose.nextInt(10) > 0;
                });
                if (!isCommitted) {
                    for (TopicPartition partition : records.partitions()) {
                        if (consumer.assignment().contains(partition)) {
                            consumer.seek(partition, records.records(partition).get(0).offset());
                        }
                    }
                }
            }
        }
    }

    private byte[] output(ConsumerRecord<byte[], byte[]> record, int number) {
        String[] words = new String(record.value(), StandardCharsets.UTF_8).split(" ");
        String source = words[0] + "." + words[1] + "." + words[2];
        String text = given.get("client") + " " + given.get("instance") + " " + number + " "
                + record.partition() + " " + record.offset() + " " + source;
        return text.getBytes(StandardCharsets.UTF_8);
    }

    private static void pause(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException nobody) {
            throw new IllegalStateException(nobody);
        }
    }

    private static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
