// Sarama behind the line protocol of tests/interop/adapters/program.py.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"penstock/tests/interop/line"

	"github.com/IBM/sarama"
	"github.com/xdg-go/scram"
)

var codecs = map[string]sarama.CompressionCodec{
	"none":   sarama.CompressionNone,
	"gzip":   sarama.CompressionGZIP,
	"snappy": sarama.CompressionSnappy,
	"lz4":    sarama.CompressionLZ4,
	"zstd":   sarama.CompressionZSTD,
}

var acks = map[string]sarama.RequiredAcks{
	"0": sarama.NoResponse, "1": sarama.WaitForLocal, "all": sarama.WaitForAll,
}

// Sarama has sentences for its errors; Kafka has names.
var names = map[sarama.KError]string{
	sarama.ErrOffsetOutOfRange:         "OFFSET_OUT_OF_RANGE",
	sarama.ErrUnknownTopicOrPartition:  "UNKNOWN_TOPIC_OR_PARTITION",
	sarama.ErrMessageSizeTooLarge:      "MESSAGE_TOO_LARGE",
	sarama.ErrInvalidTopic:             "INVALID_TOPIC_EXCEPTION",
	sarama.ErrTopicAuthorizationFailed: "TOPIC_AUTHORIZATION_FAILED",
	sarama.ErrSASLAuthenticationFailed: "SASL_AUTHENTICATION_FAILED",
	sarama.ErrTopicAlreadyExists:       "TOPIC_ALREADY_EXISTS",
	sarama.ErrInvalidPartitions:        "INVALID_PARTITIONS",
	sarama.ErrInvalidConfig:            "INVALID_CONFIG",
	sarama.ErrNonEmptyGroup:            "NON_EMPTY_GROUP",
	sarama.ErrGroupIDNotFound:          "GROUP_ID_NOT_FOUND",
}

type client struct {
	bootstrap []string
	admin     sarama.ClusterAdmin
}

func main() {
	c := client{bootstrap: os.Args[1:]}
	admin, err := sarama.NewClusterAdmin(c.bootstrap, config())
	c.admin = admin
	handlers := line.Handlers{
		"produce":           c.produce,
		"consume":           c.consume,
		"offset":            c.offset,
		"resume":            c.resume,
		"groups":            c.groups,
		"describe_group":    c.describeGroup,
		"committed":         c.committed,
		"alter_committed":   c.alterCommitted,
		"delete_committed":  c.deleteCommitted,
		"delete_group":      c.deleteGroup,
		"create_topic":      c.createTopic,
		"delete_topic":      c.deleteTopic,
		"create_partitions": c.createPartitions,
		"delete_records":    c.deleteRecords,
		"topics":            c.topics,
		"describe_topic":    c.describeTopic,
		"describe_configs":  c.describeConfigs,
		"alter_config":      c.alterConfig,
		"describe_cluster":  c.describeCluster,
	}
	if err != nil {
		line.Refuse(handlers, err, nameOf)
		return
	}
	line.Serve(handlers, c.join, nameOf)
}

func config() *sarama.Config {
	config := sarama.NewConfig()
	config.Version = sarama.MaxVersion
	config.Consumer.Return.Errors = true
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Group.Session.Timeout = line.SessionTimeout
	config.Consumer.Group.Heartbeat.Interval = line.HeartbeatInterval
	secure(config, line.Secured())
	return config
}

func secure(config *sarama.Config, security line.Security) {
	if security.Protocol == "" {
		return
	}
	config.Net.TLS.Enable = true
	config.Net.TLS.Config = security.TLS()
	if security.Mechanism == "" {
		return
	}
	config.Net.SASL.Enable = true
	config.Net.SASL.Mechanism = sarama.SASLMechanism(security.Mechanism)
	config.Net.SASL.User = security.User
	config.Net.SASL.Password = security.Password
	config.Net.SASL.SCRAMClientGeneratorFunc = func() sarama.SCRAMClient {
		if security.Mechanism == sarama.SASLTypeSCRAMSHA256 {
			return &conversation{hash: scram.SHA256}
		}
		return &conversation{hash: scram.SHA512}
	}
}

// conversation is SCRAM, which Sarama leaves to its users.
type conversation struct {
	hash scram.HashGeneratorFcn
	*scram.ClientConversation
}

func (c *conversation) Begin(user, password, authorizationID string) error {
	client, err := c.hash.NewClient(user, password, authorizationID)
	if err == nil {
		c.ClientConversation = client.NewConversation()
	}
	return err
}

func nameOf(err error) string {
	var several sarama.ProducerErrors
	if errors.As(err, &several) && len(several) > 0 {
		err = several[0].Err
	}
	var code sarama.KError
	if errors.As(err, &code) {
		return names[code]
	}
	// Some calls keep only the text of the error they got.
	for code, name := range names {
		if strings.Contains(err.Error(), code.Error()) {
			return name
		}
	}
	return "UNKNOWN_SERVER_ERROR"
}

// Reading and writing

func (c client) produce(command line.Command) (any, error) {
	config := config()
	config.Producer.RequiredAcks = acks[command.Acks]
	config.Producer.Compression = codecs[command.Codec]
	config.Producer.Return.Successes = true
	config.Producer.Flush.Frequency = 20 * time.Millisecond
	config.Producer.MaxMessageBytes = 2_000_000
	config.Producer.Partitioner = sarama.NewMurmur2Partitioner
	if command.Idempotent {
		config.Producer.Idempotent = true
		config.Net.MaxOpenRequests = 1
	}
	var messages []*sarama.ProducerMessage
	for _, each := range command.Records {
		message := &sarama.ProducerMessage{Topic: command.Topic}
		if each.Key != nil {
			message.Key = sarama.ByteEncoder(each.Key)
		}
		if each.Value != nil {
			message.Value = sarama.ByteEncoder(each.Value)
		}
		if each.Partition != nil {
			config.Producer.Partitioner = sarama.NewManualPartitioner
			message.Partition = *each.Partition
		}
		if each.Timestamp != nil {
			message.Timestamp = time.UnixMilli(*each.Timestamp)
		}
		for _, header := range each.Headers {
			pair := sarama.RecordHeader{Key: []byte(header.Name), Value: header.Value}
			message.Headers = append(message.Headers, pair)
		}
		messages = append(messages, message)
	}
	producer, err := sarama.NewSyncProducer(c.bootstrap, config)
	if err != nil {
		return nil, err
	}
	err = producer.SendMessages(messages)
	written := [][2]int64{}
	for _, message := range messages {
		written = append(written, [2]int64{int64(message.Partition), message.Offset})
	}
	return written, errors.Join(err, producer.Close())
}

func (c client) consume(command line.Command) (any, error) {
	consumer, err := sarama.NewConsumer(c.bootstrap, config())
	if err != nil {
		return nil, err
	}
	defer consumer.Close()
	messages := make(chan *sarama.ConsumerMessage)
	failed := make(chan error)
	for _, start := range command.Starts {
		partition, err := consumer.ConsumePartition(command.Topic, int32(start[0]), start[1])
		if err != nil {
			return nil, err
		}
		defer partition.AsyncClose()
		go func() {
			for message := range partition.Messages() {
				messages <- message
			}
		}()
		go func() {
			for err := range partition.Errors() {
				failed <- err
			}
		}()
	}
	received := []line.Record{}
	deadline := time.After(line.Patience)
	for len(received) < command.Count {
		select {
		case message := <-messages:
			received = append(received, fields(message))
		case err := <-failed:
			return nil, err
		case <-deadline:
			return nil, fmt.Errorf("%d of %d records came", len(received), command.Count)
		}
	}
	return received, nil
}

func (c client) offset(command line.Command) (any, error) {
	at, isNumber := command.Timestamp()
	if !isNumber {
		// ListOffsets' own codes (KIP-79, KIP-734).
		at = map[any]int64{"earliest": -2, "latest": -1, "max_timestamp": -3}[command.When]
	}
	asked := map[string]map[int32]int64{command.Topic: {command.Partition: at}}
	listed, err := c.admin.ListOffsets(asked, nil)
	if err != nil {
		return nil, err
	}
	found := listed[command.Topic][command.Partition]
	if found.Err != sarama.ErrNoError {
		return nil, found.Err
	}
	return found.Offset, nil
}

// Groups

// claims receives what a consumer of a group is given, session after session.
type claims struct {
	topic    string
	assigned func([]int32)
	revoked  func([]int32)
	received func(sarama.ConsumerGroupSession, *sarama.ConsumerMessage)
}

func (c claims) Setup(session sarama.ConsumerGroupSession) error {
	c.assigned(session.Claims()[c.topic])
	return nil
}

func (c claims) Cleanup(session sarama.ConsumerGroupSession) error {
	c.revoked(session.Claims()[c.topic])
	return nil
}

func (c claims) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for message := range claim.Messages() {
		c.received(session, message)
	}
	return nil
}

func (c client) join(command line.Command) (*line.Member, error) {
	config := config()
	config.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{sarama.NewBalanceStrategyRange()}
	if command.InstanceID != nil {
		config.Consumer.Group.InstanceId = *command.InstanceID
	}
	group, err := sarama.NewConsumerGroup(c.bootstrap, command.Group, config)
	if err != nil {
		return nil, err
	}
	member := &line.Member{}
	handler := claims{
		topic:    command.Topic,
		assigned: member.Assigned,
		revoked:  member.Revoked,
		received: func(session sarama.ConsumerGroupSession, message *sarama.ConsumerMessage) {
			member.Received(fields(message))
			session.MarkMessage(message, "")
		},
	}
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for err := range group.Errors() {
			member.Failed(err)
		}
	}()
	go func() {
		defer close(ended)
		// A session ends with every rebalance; the next call joins the next one.
		for ctx.Err() == nil {
			if err := group.Consume(ctx, []string{command.Topic}, handler); err != nil && ctx.Err() == nil {
				member.Failed(err)
				return
			}
		}
	}()
	member.Close = func() {
		cancel()
		<-ended
		if err := group.Close(); err != nil {
			member.Failed(err)
		}
	}
	return member, nil
}

func (c client) resume(command line.Command) (any, error) {
	config := config()
	config.Consumer.Offsets.AutoCommit.Enable = false
	group, err := sarama.NewConsumerGroup(c.bootstrap, command.Group, config)
	if err != nil {
		return nil, err
	}
	defer group.Close()
	ctx, cancel := context.WithTimeout(context.Background(), line.Patience)
	defer cancel()
	taken := make(chan struct{}, 1)
	taken <- struct{}{}
	received := []line.Record{}
	handler := claims{
		topic:    command.Topic,
		assigned: func([]int32) {},
		revoked:  func([]int32) {},
		received: func(session sarama.ConsumerGroupSession, message *sarama.ConsumerMessage) {
			<-taken
			defer func() { taken <- struct{}{} }()
			if len(received) == command.Count {
				return
			}
			received = append(received, fields(message))
			session.MarkMessage(message, "")
			if len(received) == command.Count {
				session.Commit()
				cancel()
			}
		},
	}
	err = group.Consume(ctx, []string{command.Topic}, handler)
	if len(received) < command.Count {
		return nil, fmt.Errorf("%d of %d records came: %w", len(received), command.Count, err)
	}
	return received, err
}

func (c client) groups(line.Command) (any, error) {
	listed, err := c.admin.ListConsumerGroups()
	groups := []string{}
	for name := range listed {
		groups = append(groups, name)
	}
	return groups, err
}

func (c client) describeGroup(command line.Command) (any, error) {
	described, err := c.admin.DescribeConsumerGroups([]string{command.Group})
	if err != nil {
		return nil, err
	}
	group := described[0]
	members := []any{}
	for _, member := range group.Members {
		partitions := []int32{}
		assignment, err := member.GetMemberAssignment()
		if err != nil {
			return nil, err
		}
		if assignment != nil {
			for _, some := range assignment.Topics {
				partitions = append(partitions, some...)
			}
		}
		members = append(members, map[string]any{
			"client_id": member.ClientId, "partitions": partitions, "instance_id": member.GroupInstanceId,
		})
	}
	return map[string]any{"state": group.State, "assignor": group.Protocol, "members": members}, nil
}

func (c client) committed(command line.Command) (any, error) {
	partitions := command.PartitionList()
	fetched, err := c.admin.ListConsumerGroupOffsets(command.Group, map[string][]int32{command.Topic: partitions})
	if err != nil {
		return nil, err
	}
	found := [][2]int64{}
	for _, partition := range partitions {
		if block := fetched.GetBlock(command.Topic, partition); block != nil {
			found = append(found, [2]int64{int64(partition), block.Offset})
		}
	}
	return found, nil
}

func (c client) alterCommitted(command line.Command) (any, error) {
	wanted := map[int32]sarama.OffsetAndMetadata{}
	for _, pair := range command.Offsets {
		wanted[int32(pair[0])] = sarama.OffsetAndMetadata{Offset: pair[1], LeaderEpoch: -1}
	}
	offsets := map[string]map[int32]sarama.OffsetAndMetadata{command.Topic: wanted}
	answer, err := c.admin.AlterConsumerGroupOffsets(command.Group, offsets, nil)
	if err != nil {
		return nil, err
	}
	for _, code := range answer.Errors[command.Topic] {
		if code != sarama.ErrNoError {
			return nil, code
		}
	}
	return nil, nil
}

func (c client) deleteCommitted(command line.Command) (any, error) {
	for _, partition := range command.PartitionList() {
		if err := c.admin.DeleteConsumerGroupOffset(command.Group, command.Topic, partition); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

func (c client) deleteGroup(command line.Command) (any, error) {
	return nil, c.admin.DeleteConsumerGroup(command.Group)
}

// Topics, settings and the cluster

func (c client) createTopic(command line.Command) (any, error) {
	entries := map[string]*string{}
	for name, value := range command.Configs {
		entries[name] = &value
	}
	detail := &sarama.TopicDetail{
		NumPartitions: command.PartitionCount(), ReplicationFactor: 1, ConfigEntries: entries,
	}
	return nil, c.admin.CreateTopic(command.Topic, detail, false)
}

func (c client) deleteTopic(command line.Command) (any, error) {
	return nil, c.admin.DeleteTopic(command.Topic)
}

func (c client) createPartitions(command line.Command) (any, error) {
	return nil, c.admin.CreatePartitions(command.Topic, int32(command.Count), nil, false)
}

func (c client) deleteRecords(command line.Command) (any, error) {
	before := map[int32]int64{}
	for _, pair := range command.Before {
		before[int32(pair[0])] = pair[1]
	}
	return nil, c.admin.DeleteRecords(command.Topic, before)
}

func (c client) topics(line.Command) (any, error) {
	listed, err := c.admin.ListTopics()
	topics := []string{}
	for name := range listed {
		topics = append(topics, name)
	}
	return topics, err
}

func (c client) describeTopic(command line.Command) (any, error) {
	described, err := c.admin.DescribeTopics([]string{command.Topic})
	if err != nil {
		return nil, err
	}
	if described[0].Err != sarama.ErrNoError {
		return nil, described[0].Err
	}
	partitions := [][]any{}
	for _, each := range described[0].Partitions {
		partitions = append(partitions, []any{each.ID, each.Leader, each.Replicas, each.Isr})
	}
	return partitions, nil
}

func (c client) describeConfigs(command line.Command) (any, error) {
	described, err := c.admin.DescribeConfig(sarama.ConfigResource{Type: sarama.TopicResource, Name: command.Topic})
	configs := [][]any{}
	for _, each := range described {
		configs = append(configs, []any{each.Name, each.Value, each.Source != sarama.SourceTopic})
	}
	return configs, err
}

func (c client) alterConfig(command line.Command) (any, error) {
	change := sarama.IncrementalAlterConfigsEntry{Operation: sarama.IncrementalAlterConfigsOperationSet}
	change.Value = command.Value
	if command.Value == nil {
		change.Operation = sarama.IncrementalAlterConfigsOperationDelete
	}
	entries := map[string]sarama.IncrementalAlterConfigsEntry{command.Name: change}
	return nil, c.admin.IncrementalAlterConfig(sarama.TopicResource, command.Topic, entries, false)
}

func (c client) describeCluster(line.Command) (any, error) {
	described, controller, err := c.admin.DescribeCluster()
	brokers := [][]any{}
	for _, each := range described {
		host, port, err := net.SplitHostPort(each.Addr())
		if err != nil {
			return nil, err
		}
		number, err := strconv.Atoi(port)
		if err != nil {
			return nil, err
		}
		brokers = append(brokers, []any{each.ID(), host, number})
	}
	return map[string]any{"cluster_id": nil, "controller_id": controller, "brokers": brokers}, err
}

func fields(message *sarama.ConsumerMessage) line.Record {
	record := line.Record{
		Partition: message.Partition, Offset: message.Offset, Timestamp: message.Timestamp.UnixMilli(),
		Key: message.Key, Value: message.Value,
	}
	for _, header := range message.Headers {
		record.Headers = append(record.Headers, line.Header{Name: string(header.Key), Value: header.Value})
	}
	return record
}
